#if canImport(ImageIO)
import CoreGraphics
import Foundation
import ImageIO
import PictureMath
import UniformTypeIdentifiers

extension Picture {
    /// Writes the picture as a PNG file, in sRGB.
    public func writePNG(to file: URL) throws {
        guard let provider = CGDataProvider(data: Data(pixels) as CFData),
            let space = CGColorSpace(name: CGColorSpace.sRGB),
            let image = CGImage(
                width: width, height: height, bitsPerComponent: 8, bitsPerPixel: 24, bytesPerRow: 3 * width, space: space,
                bitmapInfo: CGBitmapInfo(rawValue: CGImageAlphaInfo.none.rawValue), provider: provider, decode: nil,
                shouldInterpolate: false, intent: .defaultIntent
            ),
            let destination = CGImageDestinationCreateWithURL(file as CFURL, UTType.png.identifier as CFString, 1, nil)
        else {
            throw PictureError("\(file.path) cannot be written as a PNG file")
        }
        CGImageDestinationAddImage(destination, image, nil)
        guard CGImageDestinationFinalize(destination) else {
            throw PictureError("\(file.path) cannot be written; does its folder exist?")
        }
    }
}
#endif
